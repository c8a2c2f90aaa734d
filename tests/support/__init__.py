"""The tests' harness: children with a deadline, a guard against leaks, and functions that read
`/proc`.
"""
