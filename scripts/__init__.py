"""Programs for developers, and in `testing` what they and the tests share; none of this is installed."""
