# SPDX-License-Identifier: Apache-2.0
"""Every exception Headrace raises on purpose.

HeadraceError                    500  internal_error
├── UserError                    400  invalid_request_error      a mistake in what the user gave
│   ├── ConfigError              400  invalid_config             a setting (command line: exit code 2)
│   ├── ModelLoadError           400  model_load_failed          a checkpoint (command line: exit code 2)
│   ├── RequestError             400  invalid_request            one request's field
│   │   └── ContextLengthError   400  context_length_exceeded
│   ├── ModelNotFoundError       404  model_not_found
│   └── BodyTooLargeError        413  body_too_large
└── EngineError                  500  engine_error               the engine could not answer
    ├── EngineDeadError          503  engine_dead                the engine is gone; nothing more will be answered
    └── EngineOverloadedError    503  engine_overloaded
"""


class HeadraceError(Exception):
    """Root of the tree; `status` is the HTTP status, `code` the machine-readable reason, `param` the field at fault."""

    status = 500
    code = "internal_error"
    type = "server_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class UserError(HeadraceError):
    status = 400
    code = "invalid_request_error"
    type = "invalid_request_error"


class ConfigError(UserError):
    code = "invalid_config"


class ModelLoadError(UserError):
    code = "model_load_failed"


class RequestError(UserError):
    code = "invalid_request"


class ContextLengthError(RequestError):
    code = "context_length_exceeded"


class ModelNotFoundError(UserError):
    status = 404
    code = "model_not_found"


class BodyTooLargeError(UserError):
    status = 413
    code = "body_too_large"


class EngineError(HeadraceError):
    code = "engine_error"


class EngineDeadError(EngineError):
    status = 503
    code = "engine_dead"


class EngineOverloadedError(EngineError):
    status = 503
    code = "engine_overloaded"
