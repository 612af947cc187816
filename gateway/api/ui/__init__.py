"""The dashboard at `/ui`: its page, and the feed that fills it.

`page/` has the files as browsers get them: no build step, and nothing is loaded from elsewhere. `reading` makes tables
of what the gateway's parts report, `feed` sends them to whoever watches, `routes` is the HTTP of both.
"""
