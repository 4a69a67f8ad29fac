"""What a network costs a run, worked out before anybody pays for it. Nothing here trains, connects or measures.

`utilisation` reproduces the published table; `predict`, `memory` and `search` speak about our own trainer. They are
pure and know neither torch nor files: `workload` reads the model, `profiles` reads what was measured.

May import: train and below, in `workload.py` only. Start with `plan.py`, then `predict.py`.
"""
