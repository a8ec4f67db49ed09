"""Shows the service on one page, which `hone report` writes.

`gather` asks the service, and `page` draws the answers without asking anything. The other files draw the
sections of the page.
"""
