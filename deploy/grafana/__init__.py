"""Grafana dashboards: `panels` is the table of what they show, `dashboards` writes the JSON beside it, which is
committed (`make dashboards`)."""
