"""What is trained: the built-in decoder and Hugging Face models, what they cost, and what accelerators can do.

May import: config and below. Start with `build.py`.
"""
