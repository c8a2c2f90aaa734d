"""What a machine allows and how a loader fares on it, each fact with a verdict; prints nothing."""
