"""Optional behaviour of the service, each behind one seam: a plain request runs none of its code."""
