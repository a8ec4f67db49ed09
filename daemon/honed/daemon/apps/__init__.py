"""Models of users' own, brought by their apps: names, quotas, who sees which, when they are compiled."""
