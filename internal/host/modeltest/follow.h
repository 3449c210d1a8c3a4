/* The recorded traces that fence.pml follows with TRACES: the file that the variable
 * TRACES names, with a line for each. A line has the scenario, the kinds of some
 * events, and the events that are seen, each list after its length: an event with its
 * kind, and one with the first and the last time at which it may have happened.
 * accepted and furthest are not part of a state. */

#define LOST (-1)
#define MOST 200000 /* traces */
#define WINDOW 31   /* events that may happen before an earlier one of the list */

#define OPEN 0x7fffffff /* the last time of what may happen after the end */
#define CLIENTS 3   /* as in the model */

/* Fields of the scenario. */
enum { IS_QUIET, IS_DEEP, RELAYED, HAS_CLIENTS = RELAYED + CLIENTS, HAS_REQUESTS, HAS_USERS, HAS_VERBS, HAS_CHECKS, HAS_LATER,
	HAS_CRASHES, HAS_ENDS, KEPT, TIMED, IS_REAL, HAS_LATE, FIELDS };

#define timed (recordings[now.which].scenario[TIMED]) /* something may have been active too recently */
#define bare (!recordings[now.which].scenario[KEPT]) /* no socket is kept */

/* Kinds of events. The last events of the kind DELAYED are missing if their daemon
 * dies. Those of the kind UNTRACED are so, too, and from the death on until the next
 * daemon reports an event they are not seen. */
enum { SEEN, HIDDEN, DELAYED, UNTRACED };

struct event { int number, from, to; };
struct recording { int scenario[FIELDS], n, crash /* its event; n for none */; unsigned char kinds[256]; struct event *events; };
static struct recording *recordings;
static int recorded_traces;
static unsigned char accepted[MOST];
static int furthest[MOST];

static void report(void);

static void load(void) {
	FILE *f = fopen(getenv("TRACES"), "r");
	int n, i, k, kinds, number, kind;
	if (!f || fscanf(f, "%d", &n) != 1 || n > MOST) { fprintf(stderr, "no traces\n"); exit(2); }
	recordings = calloc(n, sizeof *recordings);
	for (i = 0; i < n; i++) {
		struct recording *r = &recordings[i];
		for (k = 0; k < FIELDS; k++)
			if (fscanf(f, "%d", &r->scenario[k]) != 1) exit(2);
		if (fscanf(f, "%d", &kinds) != 1) exit(2);
		while (kinds-- > 0) {
			if (fscanf(f, "%d %d", &number, &kind) != 2) exit(2);
			r->kinds[number] = kind;
		}
		if (fscanf(f, "%d %d", &r->n, &r->crash) != 2) exit(2);
		r->events = calloc(r->n + 1, sizeof *r->events);
		for (k = 0; k < r->n; k++)
			if (fscanf(f, "%d %d %d", &r->events[k].number, &r->events[k].from, &r->events[k].to) != 3) exit(2);
	}
	fclose(f);
	recorded_traces = n;
	atexit(report);
}

static void report(void) {
	for (int i = 0; i < recorded_traces; i++)
		if (!accepted[i]) printf("rejected: %d %d\n", i, furthest[i]);
	printf("traces: %d\n", recorded_traces);
}

static void scenario(void) {
	int *s = recordings[now.which].scenario;
	now.quiet = s[IS_QUIET]; now.deep = s[IS_DEEP];
	for (int i = 0; i < CLIENTS; i++) now.relayed[i] = s[RELAYED + i];
	now.clients = s[HAS_CLIENTS]; now.requests = s[HAS_REQUESTS]; now.users = s[HAS_USERS]; now.verbs = s[HAS_VERBS];
	now.checks = s[HAS_CHECKS]; now.later = s[HAS_LATER]; now.crashes = s[HAS_CRASHES]; now.ends = s[HAS_ENDS]; now.real = s[IS_REAL]; now.late = s[HAS_LATE];
}

static int taken(int n) {
	return n < now.at || n > now.at && n <= now.at + WINDOW && (unsigned)now.beyond >> (n - now.at - 1) & 1;
}

/* unseen tells whether the step seen need not be among the recorded events. */
static int unseen(struct recording *r) {
	int k, kind = r->kinds[now.seen];
	if (kind < DELAYED || r->crash >= r->n) return kind == HIDDEN;
	if (!taken(r->crash)) { /* the daemon that dies has reported nothing more */
		for (k = 0; k < r->crash; k++)
			if (r->kinds[r->events[k].number] >= DELAYED && !taken(k)) return 0;
		return 1;
	}
	if (kind != UNTRACED) return 0;
	for (k = r->crash; k < r->n; k++)
		if (r->kinds[r->events[k].number] >= DELAYED && taken(k)) return 0;
	return 1;
}

/* follow takes the step seen from the recorded events: at is the first that has not
 * happened, and bit k of beyond is set if the one k+1 behind it has. An event can
 * happen unless another that has not was over before it. */
static void follow(void) {
	struct recording *r = &recordings[now.which];
	int k, over = OPEN;
	if (now.at == LOST || unseen(r)) { now.seen = 0; return; }
	for (k = 0; now.at + k < r->n && k <= WINDOW; k++) {
		struct event *e = &r->events[now.at + k];
		if (k > 0 && (unsigned)now.beyond >> (k - 1) & 1) continue;
		if (e->from > over) break; /* and so are all that follow */
		if (e->number == now.seen) goto found;
		if (e->to < over) over = e->to;
	}
	now.at = LOST; now.beyond = 0; now.seen = 0;
	return;
found:
	if (k > 0) now.beyond |= 1u << (k - 1);
	else do {
		now.at++;
		k = now.beyond & 1;
		now.beyond = (unsigned)now.beyond >> 1;
	} while (k);
	if (now.at > furthest[now.which]) furthest[now.which] = now.at;
	for (k = 0; now.at + k < r->n; k++) /* is anything left that must have happened? */
		if (r->events[now.at + k].to != OPEN && (k == 0 || k > WINDOW || !((unsigned)now.beyond >> (k - 1) & 1))) break;
	if (now.at + k >= r->n) accepted[now.which] = 1;
	now.seen = 0;
}
