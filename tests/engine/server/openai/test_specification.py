"""What the specification of the OpenAI API allows, as schemathesis makes it, is answered as the specification says."""

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.engine.server.openai.openapi_subset import specification

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
schema = schemathesis.openapi.from_dict(specification())


@schema.parametrize()
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_what_the_specification_allows_is_answered_as_it_says(case, api_server):
    case.call_and_validate(base_url=api_server.url, checks=CHECKS, timeout=30)
