"""Settings of a loader that belong together, one small class for each group, and checks of what users give.

Runs in: any process. They are made and checked in the trainer. It may import `errors`. Open first: `groups`.
"""
