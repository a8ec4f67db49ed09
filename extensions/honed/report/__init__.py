"""The service on one page: what `hone report` writes, and what else may show it.

`gather` asks the service, `page` draws what it told and knows nothing of where that is from. The other files
draw the parts of the page.
"""
