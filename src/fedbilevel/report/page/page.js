// The chart, its controls and, on a live page, the news from the server. The tables are made by the server side.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const chart = byId("chart");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 640px)");
  const finger = matchMedia("(pointer: coarse)");
  const DASHES = ["solid", "dashdot", "longdash", "dot"];
  const STROKES = { solid: "", dashdot: "7 3 2 3", longdash: "11 4", dot: "2 3", dash: "6 4" };
  const COLOURS = 7;

  let data = JSON.parse(byId("data").textContent);
  // What the reader chose. It outlives every update.
  const chosen = { metric: null, axis: "round", band: "deviation", logX: false, logY: new Map(), late: false, hidden: new Set() };
  const places = new Map(); // series -> its place among the colours: the same as long as the page is open

  function style(series) {
    if (!places.has(series.id)) places.set(series.id, places.size);
    const place = places.get(series.id);
    const cycle = Math.floor(place / COLOURS) % DASHES.length;
    const name = series.mean ? "--text" : `--series-${place % COLOURS}`;
    return {
      colour: getComputedStyle(document.documentElement).getPropertyValue(name).trim(),
      dash: series.reference ? "dash" : series.mean ? "solid" : DASHES[cycle],
      width: series.reference ? 1.6 : series.mean ? 3 : 2.4,
    };
  }

  function swatch(series) {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    const line = document.createElementNS(space, "line");
    const { colour, dash, width } = style(series);
    for (const [key, value] of Object.entries({ width: 24, height: 8, "aria-hidden": "true" })) svg.setAttribute(key, value);
    const look = { x1: 1, x2: 23, y1: 4, y2: 4, stroke: colour, "stroke-width": width + 0.6, "stroke-dasharray": STROKES[dash] };
    for (const [key, value] of Object.entries(look)) line.setAttribute(key, value);
    svg.append(line);
    return svg;
  }

  // Plotly reads names as HTML: show them as they are.
  const literal = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const short = (value) => (value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(3) : String(Number(value.toPrecision(4))));
  const transparent = (colour, share) => colour + Math.round(255 * share).toString(16).padStart(2, "0");
  const wrapped = (text) => (narrow.matches && text.length > 34 ? text.replace(/^(.{10,34}?) /, "$1\n") : text);

  function options(select, table, value) {
    const wanted = JSON.stringify(table);
    if (select.dataset.options !== wanted) {
      select.dataset.options = wanted;
      select.replaceChildren(...Object.entries(table).map(([key, title]) => new Option(title, key)));
    }
    select.value = value;
  }

  // Numbers over orders of magnitude are easier to read on a log scale.
  function spansMagnitudes(metric) {
    const values = data.series.flatMap((s) => s.metrics[metric]?.mean ?? []).filter((v) => v !== null);
    return values.length > 0 && Math.min(...values) > 0 && Math.max(...values) > 100 * Math.min(...values);
  }

  function logY() {
    if (!chosen.logY.has(chosen.metric)) chosen.logY.set(chosen.metric, spansMagnitudes(chosen.metric));
    return chosen.logY.get(chosen.metric);
  }

  const shownSeries = () => data.series.filter((s) => s.metrics[chosen.metric]);

  function points(series) {
    const curve = series.metrics[chosen.metric];
    const found = [];
    series.axes[chosen.axis].forEach((x, i) => {
      const mean = curve.mean[i];
      if (x === null || mean === null || (chosen.logX && x <= 0) || (logY() && mean <= 0)) return;
      const spread = curve.deviation[i] === null ? null : curve.deviation[i] / (chosen.band === "error" ? Math.sqrt(curve.seeds[i]) : 1);
      found.push({ x, mean, spread, seeds: curve.seeds[i], round: series.axes.round[i] });
    });
    return found;
  }

  // A band that reaches zero has no end on a log scale: there it is cut at a tenth of the mean.
  const lower = (p) => (logY() ? Math.max(p.mean - p.spread, p.mean / 10) : p.mean - p.spread);

  function range(lists) {
    const values = [];
    for (const list of lists) {
      const from = chosen.late && list.length ? list[list.length - 1].round / 10 : 0;
      for (const p of list.filter((p) => p.round >= from)) {
        values.push(p.mean);
        if (chosen.band !== "none" && p.spread !== null) values.push(p.mean + p.spread, lower(p));
      }
    }
    if (!values.length) return undefined;
    const scaled = logY() ? values.map(Math.log10) : values;
    const [low, high] = [Math.min(...scaled), Math.max(...scaled)];
    const margin = 0.05 * (high - low) || (logY() ? 0.3 : 0.1 * Math.abs(high) || 1);
    return [low - margin, high + margin];
  }

  function traces(series, list) {
    const { colour, dash, width } = style(series);
    const common = { legendgroup: series.id, showlegend: false, x: list.map((p) => p.x) };
    const made = [];
    const banded = list.filter((p) => p.spread !== null);
    if (chosen.band !== "none" && banded.length) {
      const x = banded.map((p) => p.x);
      made.push({
        ...common, uid: `${series.id}-band`, hoverinfo: "skip", mode: "lines", line: { width: 0 }, fill: "toself",
        fillcolor: transparent(colour, dark.matches ? 0.22 : 0.16),
        x: [...x, ...x.slice().reverse()],
        y: [...banded.map((p) => p.mean + p.spread), ...banded.slice().reverse().map(lower)],
      });
    }
    const hover = list.map((p) => {
      const seeds = series.seeds > 1 ? `<br>mean of ${p.seeds} of ${series.seeds} seeds` : "";
      const spread = p.spread === null || chosen.band === "none" ? "" : ` ± ${short(p.spread)}`;
      return `<b>${literal(series.name)}</b><br>${literal(data.metrics[chosen.metric])}: ${short(p.mean)}${spread}` +
        `<br>${literal(data.axes[chosen.axis])}: ${short(p.x)}` + (chosen.axis === "round" ? "" : `<br>round ${p.round}`) + seeds;
    });
    const line = (uid, keep, dashed, thick) => ({
      ...common, uid: `${series.id}-${uid}`, name: literal(series.name), connectgaps: false,
      mode: list.length < 12 ? "lines+markers" : "lines", marker: { size: 6, color: colour },
      line: { color: colour, dash: dashed, width: thick }, y: list.map((p, i) => (keep(p, i) ? p.mean : null)),
      text: hover, hovertemplate: "%{text}<extra></extra>",
    });
    const whole = (p) => p.seeds === series.seeds;
    made.push(line("line", whole, dash, width));
    if (!list.every(whole)) {
      const beside = (p, i) => !whole(p) || (i > 0 && !whole(list[i - 1])) || (i + 1 < list.length && !whole(list[i + 1]));
      made.push(line("rest", beside, "dot", 1.4));
    }
    return made;
  }

  function draw() {
    const titles = Object.keys(data.metrics);
    byId("curves").textContent = data.heading;
    byId("drawn").hidden = !data.heading; // there is nothing that could have curves
    if (!data.heading) return undefined;
    if (!titles.includes(chosen.metric)) chosen.metric = titles[0] ?? null;
    options(byId("metric"), data.metrics, chosen.metric);
    const log = chosen.metric !== null && logY();
    const several = data.series.some((s) => s.seeds > 1);
    byId("band-field").hidden = !several;
    byId("axis").value = chosen.axis;
    byId("band").value = chosen.band;
    byId("log-x").checked = chosen.logX;
    byId("log-y").checked = log;
    byId("late").checked = chosen.late;
    data.series.forEach(style); // everybody has a colour before anybody is drawn
    legend();
    for (const mark of document.querySelectorAll("[data-series]")) {
      const series = data.series.find((s) => s.id === mark.dataset.series);
      if (series) mark.replaceChildren(swatch(series));
    }

    const visible = shownSeries().filter((s) => !chosen.hidden.has(s.id));
    const lists = visible.map(points);
    const y = range(lists);
    const css = getComputedStyle(document.documentElement);
    const colour = (name) => css.getPropertyValue(name).trim();
    const axis = (title, log) => ({
      title: { text: literal(title).replace("\n", "<br>"), standoff: 12 }, type: log ? "log" : "linear", gridcolor: colour("--grid"),
      linecolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true, nticks: narrow.matches ? 6 : 10,
      exponentformat: "power", dtick: undefined, minor: { showgrid: false },
    });
    const layout = {
      xaxis: axis(data.axes[chosen.axis] + (["round", "seconds"].includes(chosen.axis) || chosen.axis.startsWith("mega") ? "" : " (all clients)"), chosen.logX),
      yaxis: { ...axis(wrapped(data.metrics[chosen.metric] ?? ""), log), ...(y ? { range: y } : {}) },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("--soft") },
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--text") }, align: "left" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: colour("--accent") },
      margin: { l: 56, r: 20, t: 30, b: 50 }, dragmode: finger.matches ? false : "zoom",
      // A zoom stays while the reader looks at the same thing.
      uirevision: [chosen.metric, chosen.axis, chosen.logX, log, chosen.late].join(" "),
      annotations: visible.length && lists.some((l) => l.length) ? [] : [{ text: titles.length ? "nothing to show" : "no records yet", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }],
    };
    const config = { responsive: true, displaylogo: false, displayModeBar: finger.matches || narrow.matches ? false : "hover", modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]], toImageButtonOptions: { format: "svg", filename: "curves" } };
    const drawn = visible.flatMap((series, i) => traces(series, lists[i]));
    // Bands first, so that no band covers a line.
    drawn.sort((a, b) => Number(a.fill !== "toself") - Number(b.fill !== "toself"));
    describe(several, log);
    return Plotly.react(chart, drawn, layout, config);
  }

  function describe(several, log) {
    const parts = [];
    if (several) {
      parts.push("Lines are means over seeds, drawn against the mean of the horizontal quantity.");
      if (chosen.band !== "none") parts.push(`Bands are ± one standard ${chosen.band} over seeds${log ? ", cut at a tenth of the mean" : ""}.`);
      const partial = ({ metrics, seeds }) => metrics[chosen.metric].seeds.some((n) => n > 0 && n < seeds);
      if (shownSeries().some(partial)) parts.push("Thin dots: not all seeds have got there or have a number.");
    }
    if (data.series.some((s) => s.reference)) parts.push("Dashed: what the runs are compared with.");
    if (data.caption) parts.push(data.caption);
    byId("caption").textContent = parts.join(" ");
    const names = shownSeries().filter((s) => !chosen.hidden.has(s.id)).map((s) => s.name);
    chart.setAttribute("aria-label", `${data.metrics[chosen.metric] ?? "Nothing"} against ${data.axes[chosen.axis]}: ${names.join(", ")}. The last values are in the summary table.`);
  }

  function legend() {
    const list = byId("legend");
    const shown = shownSeries();
    const old = new Map([...list.querySelectorAll("button")].map((button) => [button.dataset.id, button]));
    const wanted = shown.map((series) => {
      const button = old.get(series.id) ?? document.createElement("button");
      button.type = "button";
      button.dataset.id = series.id;
      button.setAttribute("aria-pressed", String(!chosen.hidden.has(series.id)));
      const mark = Object.assign(document.createElement("span"), { className: "swatch" });
      mark.append(swatch(series));
      button.replaceChildren(mark, document.createTextNode(series.name));
      return button;
    });
    const order = JSON.stringify(shown.map((s) => s.id));
    if (list.dataset.order !== order) { // moving a button would take the focus from it
      list.dataset.order = order;
      list.replaceChildren(...wanted.map((button) => {
        const item = document.createElement("li");
        item.append(button);
        return item;
      }));
    }
    byId("all").hidden = shown.length < 3;
    byId("all").textContent = shown.some((s) => !chosen.hidden.has(s.id)) ? "hide all" : "show all";
  }

  byId("legend").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const id = button.dataset.id;
    if (!chosen.hidden.delete(id)) chosen.hidden.add(id);
    draw();
  });
  byId("all").addEventListener("click", () => {
    const shown = shownSeries();
    const some = shown.some((s) => !chosen.hidden.has(s.id));
    for (const { id } of shown) some ? chosen.hidden.add(id) : chosen.hidden.delete(id);
    draw();
  });
  const on = (id, change) => byId(id).addEventListener("change", (event) => { change(event.target); draw(); });
  on("metric", (select) => { chosen.metric = select.value; });
  on("axis", (select) => { chosen.axis = select.value; });
  on("band", (select) => { chosen.band = select.value; });
  on("log-x", (box) => { chosen.logX = box.checked; });
  on("log-y", (box) => { chosen.logY.set(chosen.metric, box.checked); });
  on("late", (box) => { chosen.late = box.checked; });
  document.querySelector(".controls").addEventListener("submit", (event) => event.preventDefault());
  for (const query of [dark, narrow, finger]) query.addEventListener("change", draw);
  draw();

  if (!("live" in document.body.dataset)) return;

  // News: the same texts and numbers again, when something has changed.
  let mark = null;
  const told = {};
  function replace(id, html) {
    const place = byId(id);
    const selection = getSelection();
    const copying = !selection.isCollapsed && place.contains(selection.anchorNode);
    if (told[id] === html || copying) return;
    told[id] = html;
    const open = new Map([...place.querySelectorAll("details[id]")].map((d) => [d.id, d.open]));
    const scrolled = new Map([...place.querySelectorAll(".scroll")].map((box) => [box.getAttribute("aria-label"), box.scrollLeft]));
    const focused = place.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    place.innerHTML = html;
    for (const details of place.querySelectorAll("details[id]")) if (open.has(details.id)) details.open = open.get(details.id);
    for (const box of place.querySelectorAll(".scroll")) {
      box.scrollLeft = scrolled.get(box.getAttribute("aria-label")) ?? 0;
      if (focused && box.getAttribute("aria-label") === focused) box.focus({ preventScroll: true });
    }
  }
  function tell(text, lost) {
    const news = byId("news");
    if (news.textContent !== text) news.textContent = text;
    news.classList.toggle("lost", lost);
  }
  // How long ago something was, for every <time data-at="seconds since 1970">.
  function ages() {
    for (const time of document.querySelectorAll("time[data-at]")) {
      const seconds = Math.max(0, Math.round(Date.now() / 1000 - Number(time.dataset.at)));
      const [size, unit] = [[86400, "day"], [3600, "h"], [60, "min"], [1, "s"]].find(([size]) => seconds >= size) ?? [1, "s"];
      const count = Math.floor(seconds / size);
      const text = seconds < 2 ? "just now" : `${count} ${unit}${unit === "day" && count > 1 ? "s" : ""} ago`;
      if (time.textContent !== text) time.textContent = text;
    }
  }
  setInterval(ages, 1000);
  async function ask() {
    try {
      const answer = await fetch("data", { cache: "no-store", headers: mark ? { "If-None-Match": mark } : {} });
      if (answer.status === 200) {
        const made = await answer.json();
        mark = answer.headers.get("ETag");
        document.title = made.title;
        replace("above", made.above);
        replace("below", made.below);
        data = made.chart;
        await draw();
        ages();
        tell(`live, last news ${new Date().toTimeString().slice(0, 8)}`, false);
      } else if (answer.status === 304) {
        if (byId("news").classList.contains("lost")) tell("live", false);
      } else tell(await answer.text(), true);
    } catch {
      tell("the server does not answer; trying again", true);
    }
    setTimeout(ask, 1000);
  }
  ask();
})();
