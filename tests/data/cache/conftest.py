"""Fixtures for tests of caches."""

import pytest

from tests.data.photo_folders import photo_set


@pytest.fixture
def photos(tmp_path):
    return photo_set(tmp_path / "photos", {"cat": 3})
