package api

import _ "embed"

// OpenAPI is the OpenAPI 3.1 document of the interface under /v1, as JSON. The
// server serves it at /v1/openapi.json.
//
//go:embed openapi.json
var OpenAPI []byte
