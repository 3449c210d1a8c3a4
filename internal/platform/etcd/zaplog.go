package etcd

import (
	"context"
	"log/slog"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// zapLogger returns a logger for etcd that writes to log. etcd logs a lot, so its
// info messages become debug messages. Its warnings become info messages, since
// most of them are about its configuration. A fatal message panics instead of
// exiting, so that deferred functions run.
func zapLogger(log *slog.Logger) *zap.Logger {
	return zap.New(&slogCore{log: log.With("part", "etcd")}, zap.WithFatalHook(zapcore.WriteThenPanic))
}

type slogCore struct{ log *slog.Logger }

func (c *slogCore) level(l zapcore.Level) slog.Level {
	switch {
	case l <= zapcore.InfoLevel:
		return slog.LevelDebug
	case l == zapcore.WarnLevel:
		return slog.LevelInfo
	}
	return slog.LevelError
}

// harmless are warnings that etcd logs for every embedded store and that need no
// action, because its only client is in the same process.
var harmless = map[string]bool{
	"failed to update storage version":                                                     true,
	"Failed to detect schema version":                                                      true,
	"simple token is not cryptographically signed":                                         true,
	"Running http and grpc server on single port. This is not recommended for production.": true,
}

// Enabled implements zapcore.Core.
func (c *slogCore) Enabled(l zapcore.Level) bool {
	return c.log.Enabled(context.Background(), c.level(l))
}

// With implements zapcore.Core.
func (c *slogCore) With(fields []zapcore.Field) zapcore.Core {
	return &slogCore{log: slog.New(c.log.Handler().WithAttrs(attrs(fields)))}
}

// Check implements zapcore.Core.
func (c *slogCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

// Write implements zapcore.Core.
func (c *slogCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	level := c.level(e.Level)
	if harmless[e.Message] {
		level = slog.LevelDebug
	}
	c.log.LogAttrs(context.Background(), level, e.Message, attrs(fields)...)
	return nil
}

// Sync implements zapcore.Core.
func (c *slogCore) Sync() error { return nil }

func attrs(fields []zapcore.Field) []slog.Attr {
	enc := zapcore.NewMapObjectEncoder()
	list := make([]slog.Attr, 0, len(fields))
	for _, f := range fields {
		f.AddTo(enc)
	}
	for _, f := range fields {
		if v, ok := enc.Fields[f.Key]; ok {
			list = append(list, slog.Any(f.Key, v))
		}
	}
	return list
}
