"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# A test says what is right, never how fast: a busy machine makes any example slow.
settings.register_profile("encserve", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("encserve")
