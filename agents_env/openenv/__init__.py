"""Environments of OpenEnv, played behind their own servers: `agents-env run openenv`.

`wire` speaks the server's protocol, `actions` turns replies of the model into actions, `environment` plays an episode,
and `serving` starts a server as a process. Nothing of the OpenEnv package is imported: its pins stay in the environment
that serves.
"""
