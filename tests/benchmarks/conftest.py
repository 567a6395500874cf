import pytest


@pytest.fixture
def fast_peaks(monkeypatch):
    """Measure the peaks with short loops and a small buffer."""
    monkeypatch.setattr("benchmarks.peaks.SECONDS", 1e-3)
    monkeypatch.setattr("benchmarks.peaks.BUFFER_BYTES", 1 << 22)
