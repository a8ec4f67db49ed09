"""What commands show: tables, trees, graphs and curves."""
