"""Predict what a network costs a run, before anybody pays for it. Nothing here trains, connects or measures.

`utilisation` reproduces the published table; `predict`, `memory` and `search` describe our own trainer. These four are
pure: they read no files, and importing them loads no torch. `workload` reads the model, `profiles` reads what was
measured.

May import: train and below; what loads torch in `workload.py` only, and inside one function of `memory.py`. Start with
`plan.py`, then `predict.py`.
"""
