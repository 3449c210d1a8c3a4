// Package relay is the relay data path: it owns the listening sockets of instances
// that may be asleep, wakes an instance when a client comes, and relays the bytes
// once the application accepts connections. It knows only connections and a
// [Waker]: what an instance is, how it is thawed and who may pause it is decided
// elsewhere.
//
// # What it guarantees
//
//   - A listener lives as long as its [Instance], whatever the state of the
//     application behind it. A client is answered, or gets a clean close (HTTP: 503
//     with a reason) when the wake fails.
//   - The first bytes that a client sends arrive. Nothing is read from a client
//     before its backend connection is established.
//   - Half-closes are passed on in both directions, and a reset is passed on
//     as a reset.
//   - After [Instance.Hold] has returned, no connection and no byte can reach
//     the backend that [Instance.Activity] does not show (see below).
//   - Waiting is bounded: at most MaxWaiting arrivals for an instance, each for
//     at most WakeTimeout. A client that disconnects leaves the queue, and a
//     wake without waiting clients is canceled. A client that sent data and
//     then shut down its sending side is still served.
//   - One wake is requested, however many clients wait.
//   - No goroutine, timer or thread belongs to an instance, a listener or a
//     relayed TCP connection: a few event loops (one thread each) carry them
//     all. Only an unfinished wake, a backend that is reached through
//     [Backend.Dial], an in-memory listener and HTTP routing use goroutines.
//   - A panic while serving one connection ends that connection only.
//
// # Why no interleaving can freeze a connection
//
// All counts of a gate and its two flags live in one atomic word. An arrival adds
// itself to the count of connections inside and reads the held flag with that same
// atomic addition. Hold sets the flag in the same word. All accesses to one word
// are totally ordered, so either the addition comes first, and every later Activity
// shows the connection, or Hold comes first, and the arrival sees the flag, does
// not dial, and is counted as waiting instead. That is a single addition too, so
// the arrival is always in one of the counts. A byte of an open connection does the
// same with the count of moves in progress. It also checks the asleep flag, so that
// a byte for a paused backend requests a wake.
//
// A waiting connection is queued under the instance's lock and checks the held
// flag there; Release and Sleep clear the flag first and then take that lock.
// So either the newcomer sees the flag cleared and starts the wake, or Release
// finds it in the queue and starts it. So no connection waits for a wake that
// was not requested.
//
// The daemon's fence is therefore: Hold; freeze; Activity; if it shows anything:
// thaw and Release; otherwise commit, so that [Waker.Ready] answers no, then Sleep.
// A wake ends with: thaw, Ready answers yes, Release.
//
// # What it leaves out
//
// UDP, TLS, HTTP/2 from clients, and load balancing. A client that closes without
// having sent anything looks like one that has only shut down its sending side and
// waits for a greeting. While such a client waits for a wake, it counts as gone. If
// a waiting client disconnects, that is noticed on kernel sockets, but not on
// in-memory connections.
//
// # How to inspect it
//
// [Instance.Stats] has every outcome with its count and the last reason;
// [Instance.Activity] reports what keeps the instance awake.
package relay
