"""SGLang's dialect: `/generate` and the routes by which slime, miles and AReaL control a server of SGLang 0.5.23."""
