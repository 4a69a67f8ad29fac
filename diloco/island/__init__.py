"""One model on one mesh: sharding, inner optimizers, and its parameters as one flat vector in canonical order.

May import: model, config and what lies below them. Start with `island.py`, then `flat.py`.
"""
