"""Settings for tests of every kind."""

from hypothesis import settings

# Other tests run at the same time, so the duration of one example says nothing.
settings.register_profile("parallel", deadline=None)
settings.load_profile("parallel")
