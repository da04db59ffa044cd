"""Python runs this at its start, in the moto server of the tests (see bucket.rs).

S3 checks `If-None-Match` and writes in one step. moto checks, and writes a moment later: of two
requests at once, both could create one key.
"""

import threading

from moto.s3.responses import S3Response

put_object = S3Response.put_object
one_at_a_time = threading.Lock()


def put_object_in_one_step(self):
    with one_at_a_time:
        return put_object(self)


S3Response.put_object = put_object_in_one_step
