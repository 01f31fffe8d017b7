"""`tailrace timeline`: what a recorded run did, replica by replica, as figures, a page and a picture."""
