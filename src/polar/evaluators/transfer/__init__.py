"""An agent's work, carried into a runtime that no agent has been in.

workspace         its files, or the artifacts that a task names; then the grader's own files
protected_files   all that it changed but tests and what configures them
system            what it changed of a whole machine
links             which links of the agent's may be laid there
"""
