"""Which forms of ops vectorise right: every family of ops is tried in many forms, each against one row at a time.

`python -m proving` in `tests/` (or `make forms`) writes `devicemap/compile/forms.json`.
"""
