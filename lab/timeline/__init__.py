"""`tailrace timeline`: a recorded run, replica by replica, as figures, a page and a picture."""
