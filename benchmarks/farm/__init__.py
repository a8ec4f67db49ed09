"""What a farm of four boards gains over one."""
