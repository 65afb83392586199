"""Tests on real libraries, which the extra `models` installs; without them they are skipped."""


def pytest_configure(config):
    config.addinivalue_line("markers", "models: on real libraries; run with -m models")
