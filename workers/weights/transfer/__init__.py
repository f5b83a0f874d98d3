"""Weights that a trainer sends as tensors: the ways in which they come, a module each, and where they are kept until they are taken.

`receiver.py` does what the coordinator asks, beside the steps: it joins the trainer's group (`groups.py`: gloo; `nccl.py`), or opens
its memory (`memory.py`: files below /dev/shm; `cuda_handles.py`), and hands what comes to `kept.py`, which writes it to a folder in
the host's memory. That folder is read as any folder with weights is, so what reads, checks, splits, quantises and reloads weights
knows nothing of trainers, and the old weights serve until all is there and found to be good.
"""
