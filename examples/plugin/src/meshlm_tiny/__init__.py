"""An architecture from outside of MeshLM: how its files describe a model (family.py) and how it computes (model.py)."""
