"""`python -m deploy.grafana`, which `make dashboards` calls."""

from deploy.grafana import dashboards

dashboards.write()
