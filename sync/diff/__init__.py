"""`outrider sync diff` and `inspect`: what a push of one file over another costs, and what is in such files.

`diff` measures, `rebuild` proves it, `limit` is the entropy that both are held against, `command` is the command line.
"""
