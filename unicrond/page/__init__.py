"""The web page: what it shows (`view.py`), its files (`files.py`, `static/`). Served live and over a replayed log."""
