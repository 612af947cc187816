"""What a process reports about itself: tables of metrics, trace contexts and spans, JSON logs, and their export.

`otlp` alone imports OpenTelemetry's SDK of traces and logs and its exporters, and is imported only with `--otlp`.
"""
