"""The status of a run for Prometheus: the metrics, the reading that scrapes share, and the app that serves them."""
