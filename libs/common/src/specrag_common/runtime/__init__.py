"""What every service process is made of: settings, errors, servers, channels, logs, traces.

Nothing here knows a model or a service; torch is never imported.
"""
