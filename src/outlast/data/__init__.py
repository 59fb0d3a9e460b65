"""What is trained on: text to a token store (`corpus`), sample index to tokens (`order`).

Imports no torch.
"""
