import java.util.Locale;
import java.util.Random;
import java.util.StringJoiner;
import java.util.concurrent.CountDownLatch;

/**
 * The scenarios for timers on the JVM: the same operations, sizes and delays as in scenarios.py.
 *
 * <p>One virtual machine measures one peer at one size. It warms up first, on the same code, and
 * prints one line of JSON per operation. Whatever a peer allocates per timer is on the clock.
 */
abstract class Peer {
    private static final int WARM_UP_SIZE = 100_000;
    private static final int FEWEST_ROUNDS = 5;
    static final int EXPIRE_MS = 600;

    /** Makes an empty timer. */
    abstract void open();

    /** Schedules a task that does next to nothing, and returns its handle. */
    abstract Object schedule(int delayMs);

    abstract void cancel(Object handle);

    /** Returns when every operation so far is in the timer's structure, or out of it. */
    void settle() {}

    /** Whether settling is work of its own, worth figures of its own. */
    boolean settles() {
        return false;
    }

    /** The processor time that the peer's own thread has used so far. */
    long helperNs() {
        return 0;
    }

    /** Makes an empty timer, fills it, lets all become due, and returns the ns to fire them all. */
    abstract long expire(int[] delaysMs) throws Exception;

    abstract void close();

    /** Counts the tasks that have run; a peer runs them on one thread. */
    static final class Fired {
        private final int expected;
        private int count;
        private final CountDownLatch all = new CountDownLatch(1);

        Fired(int expected) {
            this.expected = expected;
        }

        void add() {
            if (++count == expected) {
                all.countDown();
            }
        }

        void await() throws InterruptedException {
            all.await();
        }
    }

    /** Arguments: size, seconds for the rounds of each operation, seconds of warm-up. */
    final void run(String[] arguments) throws Exception {
        int n = Integer.parseInt(arguments[0]);
        double seconds = Double.parseDouble(arguments[1]);
        double warmUpSeconds = Double.parseDouble(arguments[2]);
        warmUp(Math.min(n, WARM_UP_SIZE), warmUpSeconds);
        scheduleAndCancel(n, seconds, true);
        scheduleConstant(n, seconds, true);
        churn(n, seconds, true);
        fire(n, seconds < 0.2 ? 1 : 3, true);
        memory(n);
    }

    private void warmUp(int n, double seconds) throws Exception {
        scheduleAndCancel(n, seconds / 2, false);
        churn(n, seconds / 2, false);
        fire(n, 1, false);
    }

    private void scheduleAndCancel(int n, double seconds, boolean print) {
        int[] delays = randomDelays(n, 1_000, 600_000);
        int[] order = randomOrder(n);
        Operation schedule = new Operation("schedule", n);
        Operation cancel = new Operation("cancel", n);
        for (Rounds rounds = new Rounds(seconds); rounds.next(); ) {
            Object[] handles = new Object[n];
            open();
            schedule.measure(() -> fill(handles, delays));
            Object[] victims = shuffled(handles, order);
            cancel.measure(() -> cancelAll(victims));
            close();
        }
        if (print) {
            schedule.print();
            cancel.print();
        }
    }

    private void scheduleConstant(int n, double seconds, boolean print) {
        int[] delays = randomDelays(n, 30_000, 30_000);
        Operation schedule = new Operation("schedule_constant", n);
        for (Rounds rounds = new Rounds(seconds); rounds.next(); ) {
            Object[] handles = new Object[n];
            open();
            schedule.measure(() -> fill(handles, delays));
            cancelAll(handles);
            close();
        }
        if (print) {
            schedule.print();
        }
    }

    private void churn(int n, double seconds, boolean print) {
        int count = n + n / 5;
        int[] delays = randomDelays(n, 1_000, 600_000);
        int[] newDelays = randomDelays(count, 1_000, 600_000);
        int[] order = randomOrder(n);
        Operation churn = new Operation("churn", count);
        for (Rounds rounds = new Rounds(seconds); rounds.next(); ) {
            Object[] inOrder = new Object[n];
            open();
            fill(inOrder, delays);
            settle();
            Object[] handles = shuffled(inOrder, order);
            churn.measure(() -> replaceInTurn(handles, newDelays));
            cancelAll(handles);
            close();
        }
        if (print) {
            churn.print();
        }
    }

    private void fire(int n, int rounds, boolean print) throws Exception {
        int[] delays = randomDelays(n, 1, EXPIRE_MS);
        Figures expire = new Figures("expire");
        for (int round = 0; round < rounds; round++) {
            expire.add((double) expire(delays) / n);
        }
        if (print) {
            expire.print();
        }
    }

    /** Heap per pending timer after a collection, and the pause of System.gc(). */
    private void memory(int n) {
        int[] delays = randomDelays(n, 1_000, 600_000);
        Object[] handles = new Object[n];
        open();
        long before = usedAfterCollection();
        fill(handles, delays);
        settle();
        long used = usedAfterCollection() - before;
        long started = System.nanoTime();
        System.gc();
        double pauseMs = (System.nanoTime() - started) / 1e6;
        new Figures("bytes").add((double) used / n).print();
        new Figures("pause_ms").add(pauseMs).print();
        cancelAll(handles);
        close();
    }

    private static long usedAfterCollection() {
        long used = Long.MAX_VALUE;
        for (long now = collectAndMeasure(); now < used; now = collectAndMeasure()) {
            used = now;
        }
        return used;
    }

    private static long collectAndMeasure() {
        System.gc();
        System.runFinalization();
        Runtime runtime = Runtime.getRuntime();
        return runtime.totalMemory() - runtime.freeMemory();
    }

    final void fill(Object[] handles, int[] delays) {
        for (int i = 0; i < delays.length; i++) {
            handles[i] = schedule(delays[i]);
        }
    }

    private void cancelAll(Object[] handles) {
        for (Object handle : handles) {
            cancel(handle);
        }
    }

    private void replaceInTurn(Object[] handles, int[] delays) {
        int turn = 0;
        for (int delay : delays) {
            cancel(handles[turn]);
            handles[turn] = schedule(delay);
            turn = turn + 1 == handles.length ? 0 : turn + 1;
        }
    }

    private static Object[] shuffled(Object[] handles, int[] order) {
        Object[] shuffled = new Object[handles.length];
        for (int i = 0; i < order.length; i++) {
            shuffled[i] = handles[order[i]];
        }
        return shuffled;
    }

    private static int[] randomDelays(int n, int least, int most) {
        return new Random(1).ints(n, least, most + 1).toArray();
    }

    private static int[] randomOrder(int n) {
        int[] order = new int[n];
        Random random = new Random(2);
        for (int i = 0; i < n; i++) {
            int j = random.nextInt(i + 1);
            order[i] = order[j];
            order[j] = i;
        }
        return order;
    }

    /** Counts rounds: at least five, then for as long as the time allows. */
    private static final class Rounds {
        private final long stopAt;
        private int count;

        Rounds(double seconds) {
            stopAt = System.nanoTime() + (long) (seconds * 1e9);
        }

        boolean next() {
            return ++count <= FEWEST_ROUNDS || System.nanoTime() < stopAt;
        }
    }

    /**
     * One operation on the clock, in nanoseconds: until the calls have returned; until all is in the
     * structure or out of it; and the calls together with what the peer's own thread spent on them.
     */
    private final class Operation {
        private final int count;
        private final Figures called;
        private final Figures settled;
        private final Figures worked;

        Operation(String name, int count) {
            this.count = count;
            called = new Figures(name);
            settled = new Figures(name + "_settled");
            worked = new Figures(name + "_worked");
        }

        void measure(Runnable calls) {
            long helperBefore = helperNs();
            long started = System.nanoTime();
            calls.run();
            long calledNs = System.nanoTime() - started;
            settle();
            long settledNs = System.nanoTime() - started;
            called.add((double) calledNs / count);
            settled.add((double) settledNs / count);
            worked.add((double) (calledNs + helperNs() - helperBefore) / count);
        }

        void print() {
            called.print();
            if (settles()) {
                settled.print();
                worked.print();
            }
        }
    }

    /** The figures of every round, printed as a line of JSON. */
    private static final class Figures {
        private final String operation;
        private final StringJoiner values = new StringJoiner(", ");

        Figures(String operation) {
            this.operation = operation;
        }

        Figures add(double value) {
            values.add(String.format(Locale.ROOT, "%.2f", value));
            return this;
        }

        void print() {
            System.out.println(
                    "{\"operation\": \"" + operation + "\", \"rounds\": [" + values + "]}");
        }
    }
}
