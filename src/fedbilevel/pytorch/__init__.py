"""PyTorch models and losses, unchanged: ``fedbilevel.torch`` traces them into JAX through torchax.

Imports core and models; nothing else imports it, and it imports torch only when ``fedbilevel.torch`` is used.
"""
