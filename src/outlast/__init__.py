"""outlast: train language models on machines that fail. Kill anything, get the same bits."""

__version__ = "0.1.0"
