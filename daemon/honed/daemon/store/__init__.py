"""The store on disk: models, their versions and interfaces, and the child that reads compiled files."""
