"""A stand-in for an SGLang server, as strict as its published package; compared by hand with the real one on a CPU.

What it says is a function of the weights it loaded and of all ids before: a wrong version, a mixed one, or KV that an
update left behind, change every token after it.
"""
