"""The fleet: engines' handles, places for turns, polling, refreshes, pins and evidence of versions, the text proxy.

Other rooms enter by `Fleet`; turns by its `places`.
"""
