"""Runs: one loop (loop.py) carries out a plan (run_plan.py), for pretraining and fine-tuning.

`pretrain/` and `finetune/` make a plan from a configuration; `steps/` has the training step,
`run/` the session and the logs of every run, `sweep/` the statistics of trials.
May import artefacts and the packages below it. Read first: run_plan.py, loop.py, pretrain/train.py.
"""
