"""A stand-in for an SGLang server, as strict as its published package: no CPU build of the real one exists.

What it says is a function of the weights it loaded and of all ids before: a wrong version, a mixed one, or KV that an
update left behind, change every token after it.
"""
