import pytest


@pytest.fixture(autouse=True)
def kept(tmp_path_factory, monkeypatch):
    """Indexes are kept in a folder of each test's own."""
    place = tmp_path_factory.mktemp("kept")
    monkeypatch.setenv("TRAINER_DATA", str(place))
    return place / "shards"
