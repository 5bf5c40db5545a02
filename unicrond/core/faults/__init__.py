"""What went wrong, and whose fault it is: severity, blame, hangs.

Pure judgements over the state; which response follows is decided in `deciding`.
"""
