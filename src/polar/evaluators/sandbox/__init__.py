"""Programs that are uploaded into a runtime and run there, beside the code under test.

They import nothing of Polar's and little but the standard library: what is there is the task's Python, not ours.
"""
