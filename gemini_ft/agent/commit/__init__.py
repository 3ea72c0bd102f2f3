"""The commit, out of band: the leader, the hosts that report to it, collectors between them, and the change of leaders."""
